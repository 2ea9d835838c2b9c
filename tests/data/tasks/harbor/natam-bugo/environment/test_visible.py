import unittest

from natam.mekon import ribom
from natam.lema import dobe

class TestVisible(unittest.TestCase):
    def test_a(self):
        self.assertEqual(ribom("8", 2), [10])

    def test_b(self):
        self.assertEqual(dobe(4, 3), 7)
