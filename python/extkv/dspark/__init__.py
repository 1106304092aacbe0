"""DSpark in the engine: drafting several tokens per step and verifying them without loss.

`cost` says what a step costs, `calibration` and `estimation` what a draft is worth, and `planning`
how many drafts to verify; those import no torch.
"""
