"""Random problems against the oracle of `preflash.testing`: `make fuzz N=2000`.

`random_cases` draws cases; `problems` adds everything that decides how a case is called, as do
`*_problems` for other functions. `wrapper_trial` and `*_trial` compute them, in memory that is
`guarded`, and say everything that is wrong; `shrinking` makes smaller ones of those that fail.
`command` is the command line.
"""
