"""Convert existing settings to our configs: files of ML-Agents and of Stable-Baselines3's zoo.

A setting that cannot be read raises `SettingError`, which names its place in the file.
"""
