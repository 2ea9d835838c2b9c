#!/bin/bash
sed -i "s/return net/return gross/" /app/till.py
