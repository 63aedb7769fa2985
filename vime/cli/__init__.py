"""Commands: ``vime NAME …``. Each module has ``main(argv) -> exit code`` and imports what it needs when it runs."""
