"""Speculative decoding with DSpark: calibrated confidences and load-aware verification.

`extkv.dspark.cost` says what a step costs, `calibration` and `estimation` what a draft is worth,
and `planning` how many drafts to verify. None of them imports torch.
"""
