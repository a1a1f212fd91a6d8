"""Why values have their layouts, why not others, why collectives run, and changes of one line that would save
bytes.
"""
