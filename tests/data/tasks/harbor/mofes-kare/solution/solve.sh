#!/bin/bash
cd /app
sed -i '2s/ben - 1/ben/' mofes/kare.py
