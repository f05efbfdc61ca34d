"""Commands of `specpipe` that evaluate a pair, one module each; cli.py has the others."""
