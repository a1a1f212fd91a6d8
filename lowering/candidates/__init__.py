"""The choice of a strategy for one op: candidates along the factors of its rule, and what each costs.

Plain Python on shardings and factors; nothing here touches a module.
"""
