//! WIP
use crate::report::document::Section;
use crate::report::view::View;
pub fn section(_: &View<'_>) -> Section { let mut s = Section::new("diagnosis", "Diagnosis"); s.empty("x"); s }
