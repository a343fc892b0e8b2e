"""Equivalence tests generated for any family from its declaration, as a pytest plugin.

`pytest --nrl-family some_package.model:SomeForCausalLM` runs them for one class, registered or not.
"""
