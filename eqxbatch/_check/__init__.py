"""`explain_sites`: what follows from the sites of a program, compared with JAX.

It imports from all other folders.
"""
