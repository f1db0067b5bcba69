"""Models: a frozen base in any format with its LoRA, its loading, quantization and export."""
