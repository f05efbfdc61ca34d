"""The stages of the road, one a file."""
