"""Sampling, grading and evaluation: asyncio only, no Ray, no threads, no clock but the event loop's."""
