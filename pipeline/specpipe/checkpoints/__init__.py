"""Checkpoints: Hugging Face's folders, and the unified checkpoint that is made of them."""
