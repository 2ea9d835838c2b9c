import unittest

from natam.mekon import ribom
from natam.lema import dobe

class TestHidden(unittest.TestCase):
    def test_a(self):
        self.assertEqual(ribom("8", 2), [10])

    def test_b(self):
        self.assertEqual(ribom(4, 3), [7])

    def test_c(self):
        self.assertEqual(ribom(3, 6), [9])

    def test_d(self):
        self.assertEqual(dobe("8", 2), 10)

    def test_e(self):
        self.assertEqual(dobe(4, 3), 7)

    def test_f(self):
        self.assertEqual(dobe(3, 6), 9)
