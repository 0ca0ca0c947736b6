"""Replicas of one model behind the router of Ray Serve LLM, on the CPU of one machine: requests that never change are
asked beside others while replicas are killed, and Ray Serve starts new ones.
"""
