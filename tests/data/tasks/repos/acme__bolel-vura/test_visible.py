import unittest

from bolel.poko import lopo
from bolel.napes import rilo

class TestVisible(unittest.TestCase):
    def test_a(self):
        self.assertEqual(lopo(14, 5), {"gale": 4})

    def test_b(self):
        self.assertEqual(rilo(15, 4), [3])
