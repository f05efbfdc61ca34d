"""What is asked of the machine: its GPUs and memory, its files, its libraries."""
