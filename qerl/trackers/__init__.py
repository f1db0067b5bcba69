"""Trackers: the metrics of a run in TensorBoard, Weights & Biases, trackio or MLflow, through accelerate."""
