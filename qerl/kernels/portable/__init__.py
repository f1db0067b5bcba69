"""Products with packed 4-bit weights in Triton, for every GPU from Ampere to Blackwell."""
