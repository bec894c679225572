"""Settings of the site that ``make docs`` builds."""

import sys
from pathlib import Path

import residency

sys.path.insert(0, str(Path(__file__).parent))

project = "residency"
author = "the residency authors"
release = residency.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "glossary_links"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_title = f"residency {release}"
html_show_copyright = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True  # not residency._memory._state.MemoryState
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Memory"]
