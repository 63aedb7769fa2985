"""The two sides of train_ratio: each runs one optimizer step a request, on the same samples."""
