"""A door for clients of OpenAI's protocol, in front of one Triton or several."""
