#!/bin/bash
wc -l < /app/notes.txt > /app/lines.txt
