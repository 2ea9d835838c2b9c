import unittest

from area import area


class TestArea(unittest.TestCase):
    def test_area(self):
        self.assertEqual(area(3, 5), 15)
