"""A draft and a target that run requests together, whatever computes their logits."""
