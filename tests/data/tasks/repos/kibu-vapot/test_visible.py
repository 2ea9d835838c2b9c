import unittest

from kibu.nigi import suri
from kibu.gelo import radem

class TestVisible(unittest.TestCase):
    def test_a(self):
        self.assertEqual(suri("Den", "den"), {"guvon": True})

    def test_b(self):
        self.assertEqual(radem("lem", "lem"), True)
