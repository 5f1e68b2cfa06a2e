"""Random problems against the oracle of `preflash.testing`: `make fuzz N=2000`.

`random_cases` draws cases; `problems` adds everything that decides how a case is called, and
`wrapper_trial` computes it in memory that is `guarded`, and says everything that is wrong.
`*_trial` and `fmha_problems` do both for other functions. `shrinking` makes smaller problems of
those that fail.
`command` is the command line.
"""
