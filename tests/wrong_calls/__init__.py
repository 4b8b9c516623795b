"""Wrong calls of everything that is public, each with the message that it ends with.

A case is what is called, the exception, and what its message says. The test goes
through all of them, and sees that no public name is left out.
"""
