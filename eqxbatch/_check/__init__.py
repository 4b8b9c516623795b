"""`explain_sites`: the sites of a program, and a comparison of results with JAX.

May import from all other folders.
"""
