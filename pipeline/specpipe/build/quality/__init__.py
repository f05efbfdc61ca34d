"""What quantization costs: measured on the texts held out, reported and limited."""
