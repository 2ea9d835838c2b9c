#!/bin/bash
cd "$TEST_DIR" && python3 -m unittest -v test_outputs 2>&1
