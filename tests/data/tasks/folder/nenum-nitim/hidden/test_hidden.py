import unittest

from nenum.perum import katit
from nenum.geper import dita

class TestHidden(unittest.TestCase):
    def test_a(self):
        self.assertEqual(katit([5]), {"zopon": [15]})

    def test_b(self):
        self.assertEqual(katit([]), {"zopon": []})

    def test_c(self):
        self.assertEqual(dita([5]), {"lusal": [15]})

    def test_d(self):
        self.assertEqual(dita([]), {"lusal": []})
