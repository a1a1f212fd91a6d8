"""Plans that were made before, in a folder that processes share: found by all that a plan depends on."""
