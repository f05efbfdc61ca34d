"""Who is trusted, and what they signed: keys, the trust file, the signature over a version.

signature.py is the door to model-signing; verification.py says what a signature must be to count.
"""
