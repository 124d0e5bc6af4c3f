//! Charts as inline SVG: axes with round ticks, lines, points, rules, stacked bars. No script, no font, no colour: classes
//! name what is drawn, and `../report.css` gives them colours for light, dark and paper.

pub mod axis;
pub mod bars;
pub mod plot;
pub mod svg;

pub use axis::Axis;
pub use plot::{Dash, Mark, Plot};
