"""What went wrong on the user's side."""


class UserError(ValueError):
    """A mistake in flags, files or hooks.

    Its message is one clear line (one for each mistake) that names the file, row, flag or value and what would be
    right; commands print it without a traceback and exit with 1.
    """
