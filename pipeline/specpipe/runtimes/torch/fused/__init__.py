"""One stream at the speed of the card: few fused kernels a layer, and one CUDA graph a round."""
