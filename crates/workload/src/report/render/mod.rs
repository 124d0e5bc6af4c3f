//! The forms of a report: HTML, Markdown, CSV and JSON.

pub mod csv;
pub mod html;
pub mod json;
pub mod markdown;
