"""The three record formats of the data sets, and the problem that each record states.

gsm8k: `question`, `answer` (worked solution ending in `#### n`)            openai/gsm8k
math:  `problem`, `solution` (with `\\boxed{}`), `level` ("Level 3" or 3)    HuggingFaceH4/MATH-500, Big-Math
aime:  `problem`, `answer` (integer 0 to 999), `solution` optional          HuggingFaceH4/aime_2024
"""
