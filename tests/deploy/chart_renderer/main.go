// Renders a chart as Helm does, by Go's own templates and sprig: chart_renderer CHART RELEASE [VALUES...]
//
// Prints the documents of each template behind a line "# Source: NAME". A value that is missing is an error.
package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"gopkg.in/yaml.v3"
)

type values = map[string]interface{}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func load(path string) values {
	text, err := os.ReadFile(path)
	check(err)
	loaded := values{}
	check(yaml.Unmarshal(text, &loaded))
	return loaded
}

// The values of a file replace those of the chart, maps key by key.
func merge(into, from values) {
	for key, value := range from {
		old, isMap := into[key].(values)
		given, givesMap := value.(values)
		if isMap && givesMap {
			merge(old, given)
		} else {
			into[key] = value
		}
	}
}

func toYAML(value interface{}) string {
	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	check(encoder.Encode(value))
	return strings.TrimSuffix(out.String(), "\n")
}

// The files of a chart beside its templates, by their paths.
type files struct{ root string }

func (f files) Get(path string) (string, error) {
	text, err := os.ReadFile(filepath.Join(f.root, path))
	return string(text), err
}

func main() {
	root, release := os.Args[1], os.Args[2]
	chart, merged := load(filepath.Join(root, "Chart.yaml")), load(filepath.Join(root, "values.yaml"))
	for _, path := range os.Args[3:] {
		merge(merged, load(path))
	}
	data := values{
		"Values":  merged,
		"Files":   files{root},
		"Chart":   values{"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
		"Release": values{"Name": release, "Namespace": "default", "Service": "Helm"},
	}
	all := template.New("chart").Option("missingkey=error")
	functions := sprig.TxtFuncMap()
	functions["toYaml"] = toYAML
	functions["include"] = func(name string, of interface{}) (string, error) {
		var out bytes.Buffer
		err := all.ExecuteTemplate(&out, name, of)
		return out.String(), err
	}
	functions["required"] = func(message string, value interface{}) (interface{}, error) {
		if value == nil || value == "" {
			return nil, fmt.Errorf("%s", message)
		}
		return value, nil
	}
	all.Funcs(functions)
	paths, err := filepath.Glob(filepath.Join(root, "templates", "*"))
	check(err)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		check(err)
		_, err = all.New(filepath.Base(path)).Parse(string(text))
		check(err)
	}
	for _, path := range paths {
		name := filepath.Base(path)
		if strings.HasPrefix(name, "_") {
			continue
		}
		var out bytes.Buffer
		check(all.ExecuteTemplate(&out, name, data))
		if text := strings.TrimSpace(out.String()); text != "" && strings.HasSuffix(name, ".yaml") {
			fmt.Printf("---\n# Source: %s\n%s\n", name, strings.TrimPrefix(text, "---\n"))
		}
	}
}
