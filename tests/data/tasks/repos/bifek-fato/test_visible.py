import unittest

from bifek.saba import samuk
from bifek.pebam import revi

class TestVisible(unittest.TestCase):
    def test_a(self):
        self.assertEqual(samuk({"ker": 8}, "vom"), {"robo": 7})

    def test_b(self):
        self.assertEqual(revi({"tot": 9}, "tot"), 9)
