//! The SVG text of a picture: elements with classes, and escaped words.

use std::fmt::Write as _;

use crate::report::text::escape;

pub struct Svg {
    width: f64,
    height: f64,
    title: String,
    body: String,
}

#[derive(Clone, Copy)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

impl Anchor {
    fn word(self) -> &'static str {
        match self {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        }
    }
}

pub struct Rect {
    pub x: f64,
    pub y: f64,
    pub width: f64,
    pub height: f64,
}

impl Svg {
    /// `title` is what a screen reader says instead of the picture.
    pub fn new(width: f64, height: f64, title: &str) -> Svg {
        Svg {
            width,
            height,
            title: title.to_owned(),
            body: String::new(),
        }
    }

    pub fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let ((x1, y1), (x2, y2)) = (from, to);
        let _ = write!(
            self.body,
            r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#
        );
    }

    /// A run of straight lines.
    pub fn polyline(&mut self, class: &str, points: &[(f64, f64)], title: &str) {
        let _ = write!(self.body, r#"<polyline class="{class}" points=""#);
        for (at, (x, y)) in points.iter().enumerate() {
            let space = if at == 0 { "" } else { " " };
            let _ = write!(self.body, "{space}{x:.1},{y:.1}");
        }
        let _ = write!(self.body, r#"">{}</polyline>"#, titled(title));
    }

    /// Each arm's points have a form of their own, so that they differ without colour.
    pub fn marker(&mut self, arm: usize, at: (f64, f64), title: &str) {
        let path = marker_path(arm, at);
        let _ = write!(
            self.body,
            r#"<path class="dot a{}" d="{path}">{}</path>"#,
            arm % ARM_STYLES,
            titled(title)
        );
    }

    pub fn circle(&mut self, class: &str, (x, y): (f64, f64), radius: f64) {
        let _ = write!(
            self.body,
            r#"<circle class="{class}" cx="{x:.1}" cy="{y:.1}" r="{radius:.1}"/>"#
        );
    }

    pub fn rect(&mut self, class: &str, rect: &Rect, title: &str) {
        let Rect { x, y, width, height } = rect;
        let _ = write!(
            self.body,
            r#"<rect class="{class}" x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}">{}</rect>"#,
            titled(title)
        );
    }

    /// Level strokes, as one element.
    pub fn strokes(&mut self, class: &str, strokes: &[(f64, f64, f64)]) {
        if strokes.is_empty() {
            return;
        }
        let _ = write!(self.body, r#"<path class="{class}" d=""#);
        for (x, y, length) in strokes {
            let _ = write!(self.body, "M{x:.1} {y:.1}h{length:.1}");
        }
        self.body.push_str(r#""/>"#);
    }

    pub fn text(&mut self, class: &str, (x, y): (f64, f64), anchor: Anchor, words: &str) {
        let anchor = anchor.word();
        let words = escape(words);
        let _ = write!(
            self.body,
            r#"<text class="{class}" x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{words}</text>"#
        );
    }

    pub fn finish(self) -> String {
        let Svg {
            width,
            height,
            title,
            body,
        } = self;
        let title = escape(&title);
        format!(
            r#"<svg viewBox="0 0 {width:.0} {height:.0}" role="img" aria-label="{title}" xmlns="http://www.w3.org/2000/svg">{body}</svg>"#
        )
    }
}

/// Arms that differ in colour and marker. Further ones begin again.
pub const ARM_STYLES: usize = 6;

/// The outline of an arm's marker.
pub fn marker_path(arm: usize, (x, y): (f64, f64)) -> String {
    match arm % ARM_STYLES {
        0 => format!("M{:.1} {y:.1}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", x - 4.0),
        1 => format!("M{:.1} {:.1}h7v7h-7z", x - 3.5, y - 3.5),
        2 => format!("M{x:.1} {:.1}l4.5 8h-9z", y - 5.0),
        3 => format!("M{x:.1} {:.1}l5 5l-5 5l-5 -5z", y - 5.0),
        4 => format!("M{x:.1} {:.1}l4.5 -8h-9z", y + 5.0),
        _ => format!("M{:.1} {:.1}h3v-3h2v3h3v2h-3v3h-2v-3h-3z", x - 4.0, y - 1.0),
    }
}

fn titled(title: &str) -> String {
    match title.is_empty() {
        true => String::new(),
        false => format!("<title>{}</title>", escape(title)),
    }
}
