"""Tool calls and thoughts in the text of an answer, by the dialects that models write them in."""
