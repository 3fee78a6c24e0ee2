//! Lines over an axis of named marks, as SVG.

use std::fmt::Write as _;

/// One competitor's values.
pub struct Line {
    /// Name of the series.
    pub name: String,
    /// Set for a series of ours: drawn solid, where others are dashed.
    pub ours: bool,
    /// A value for each mark, where there is one.
    pub points: Vec<Option<f64>>,
}

const COLOURS: [&str; 12] = [
    "#0b7a75", "#c8553d", "#3f6fb5", "#e4a853", "#7a4fa0", "#55585c", "#2f9e5b", "#b5347a", "#8a6d3b", "#1f9fb8",
    "#9a9da1", "#d98c8c",
];

const WIDTH: f64 = 800.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = 600.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 330.0;

/// A picture of `lines` over `marks`.
pub fn svg(title: &str, axis: &str, marks: &[String], lines: &[Line]) -> String {
    let most = lines.iter().flat_map(|line| line.points.iter().flatten()).copied().fold(0.0, f64::max);
    let step = step(most);
    let top = (most / step).ceil().max(1.0) * step;
    let x = |at: usize| LEFT + (at as f64 + 0.5) / marks.len() as f64 * (RIGHT - LEFT);
    let y = |value: f64| BOTTOM - value / top * (BOTTOM - TOP);
    let height = (BOTTOM + 56.0).max(TOP + 16.0 * lines.len() as f64 + 12.0);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"16\" y=\"24\" font-size=\"15\" font-weight=\"bold\">{}</text>\n",
        escape(title)
    );
    let mut value = 0.0;
    while value <= top + step / 2.0 {
        let _ = writeln!(
            text,
            "<line x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{0:.1}\" y2=\"{0:.1}\" stroke=\"#dddddd\"/>\
             <text x=\"{1}\" y=\"{2:.1}\" text-anchor=\"end\">{value}</text>",
            y(value),
            LEFT - 6.0,
            y(value) + 4.0
        );
        value += step;
    }
    for (at, mark) in marks.iter().enumerate() {
        let _ = writeln!(
            text,
            "<text x=\"{0:.1}\" y=\"{1}\" text-anchor=\"end\" transform=\"rotate(-35 {0:.1} {1})\">{2}</text>",
            x(at),
            BOTTOM + 16.0,
            escape(mark)
        );
    }
    let _ = writeln!(text, "<text x=\"{RIGHT}\" y=\"{}\" text-anchor=\"end\">{}</text>", BOTTOM + 50.0, escape(axis));
    for (index, line) in lines.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let dash = if line.ours { "" } else { " stroke-dasharray=\"5 3\"" };
        let points: Vec<String> = line
            .points
            .iter()
            .enumerate()
            .filter_map(|(at, point)| point.map(|value| format!("{:.1},{:.1}", x(at), y(value))))
            .collect();
        let key = TOP + 16.0 * index as f64;
        let _ = writeln!(
            text,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\"{dash} points=\"{}\"/>\n\
             <line x1=\"{}\" x2=\"{}\" y1=\"{key}\" y2=\"{key}\" stroke=\"{colour}\" stroke-width=\"2.5\"{dash}/>\
             <text x=\"{}\" y=\"{}\">{}</text>",
            points.join(" "),
            RIGHT + 14.0,
            RIGHT + 42.0,
            RIGHT + 48.0,
            key + 4.0,
            escape(&line.name)
        );
    }
    text.push_str("</svg>\n");
    text
}

/// A round distance between grid lines, for five to ten of them.
fn step(most: f64) -> f64 {
    let power = 10f64.powf((most.max(1e-9) / 5.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| most / step <= 10.0).unwrap_or(power)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_drawn_and_named() {
        let line = |name: &str, ours, points| Line { name: name.into(), ours, points };
        let lines = [line("us", true, vec![Some(50.0), Some(80.0)]), line("a<b", false, vec![None, Some(20.0)])];
        let text = svg("t", "size", &["1".into(), "2".into()], &lines);
        assert_eq!(text.matches("<polyline").count(), 2);
        assert!(text.contains("a&lt;b") && text.contains(">80</text>") && text.trim_end().ends_with("</svg>"));
        assert_eq!([step(80.0), step(8.0), step(3.0)], [10.0, 1.0, 0.5]);
    }
}
