"""Environments and policies that act elsewhere: in turn in this process, in processes beside it, or on other machines."""
