"""Settings that people already have: files of ML-Agents and of Stable-Baselines3's zoo as configs of ours.

What cannot be read raises `SettingError`, which names its place in the file.
"""
