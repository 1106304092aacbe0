"""DSpark: drafting, verification without loss, and how many drafts to verify.

In the engine: `options` and `pairing` say what is drafted with, `speculator` drafts, `verification`
decides, `drafting` joins them to a step. `cost` says what a step costs, `calibration` and
`estimation` what a draft is worth, and `planning` how many drafts to verify; these import no torch.
"""
