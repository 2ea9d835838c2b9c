import unittest

from remer.birul import fama
from remer.bopi import dupas

class TestVisible(unittest.TestCase):
    def test_a(self):
        self.assertEqual(fama([8, 8]), ("gadum", 2))

    def test_b(self):
        self.assertEqual(dupas([9, 7, 7]), 2)
