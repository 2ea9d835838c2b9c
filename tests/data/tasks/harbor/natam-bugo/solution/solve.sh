#!/bin/bash
cd /app
sed -i '7s/tul/int(tul)/' natam/bugo.py
