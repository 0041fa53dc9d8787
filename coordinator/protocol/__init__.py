"""The pure core: no IO, no clock, no asyncio. Read in this order.

phases       the order of everything, as one table
topology     who takes part, and whether they can be checkpointed together
operation    what an operation is asked to do; stages, outcomes, limits
proofs       what each reply must show
events       what goes in and what comes out
transaction  events in, ordered effects out; its parts:
  course     its stages, from the first phase until everybody is open again
  phase_run  the waves of one phase          opening   telling everybody to open
  proving    whether a reply is a proof      legality  which call of the trainer is legal when
  calls      which calls run, which count    sentences who is waited for and why
records      the journal's records, written and read
ledger       the rollouts of a snapshot, merged from what participants say
"""
