"""The choice of a strategy for an op: candidates along the factors of its rule, and what each costs.

Plain Python on shardings and factors; nothing here touches a module.
"""
