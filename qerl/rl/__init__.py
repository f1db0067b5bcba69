"""The RL loop: rollouts, rewards, advantages, losses, updates, noise and training checkpoints."""
